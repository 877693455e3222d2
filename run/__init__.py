"""What surrounds the loop: the last check of the input, the start, the sampler, the tripwires, the end."""
