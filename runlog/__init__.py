"""Writes a run's folder and watches its processes: signals, times, the end of a rank that stalls."""
