"""What is known before a run: memory, seconds, layouts that fit. Needs neither torch nor a device."""
