"""What samples, and whether it has the policy."""
