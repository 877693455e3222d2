"""Tables: models, engines, devices, variables, limits, checks, exit codes, seeds. Imports nothing of the project and no torch."""
