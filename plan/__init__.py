"""Plans memory, time and layouts from the configuration alone, and says what a machine lacks (the doctor).

Needs no torch.
"""
