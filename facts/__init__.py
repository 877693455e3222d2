"""Tables that every room reads: models, engines, devices, exit codes, seeds. Imports no room and no torch."""
