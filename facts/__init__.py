"""Tables that every room reads: models, engines, devices, exit codes, seeds. Imports no other room and no torch."""
