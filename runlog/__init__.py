"""What a run writes into its folder while it runs."""
