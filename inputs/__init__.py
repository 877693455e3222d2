"""Reads what a user gives and refuses it in one line. Opens no model and starts nothing."""
