"""Tables: models, engines, devices, variables, limits, checks, exits, seeds. Imports no other room, and no torch."""
