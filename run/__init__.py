"""Everything around the training loop: it checks the input, starts, records and ends a run, and watches for faults."""
