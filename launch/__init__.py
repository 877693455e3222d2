"""The parts that the shell scripts share."""
