"""What a run writes into its folder, and how far a process is: signals, times, the end of a rank that stalls."""
