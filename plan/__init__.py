"""What is known before a run. Needs neither torch nor a device."""
