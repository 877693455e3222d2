"""What the run_*.sh scripts share."""
