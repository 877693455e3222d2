"""Speed and memory beside other programs. Nothing imports it."""
