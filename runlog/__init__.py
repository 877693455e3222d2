"""Writes a run's folder and watches its processes: handles signals, measures times, and ends a rank that stalls."""
