"""What the shell scripts share."""
