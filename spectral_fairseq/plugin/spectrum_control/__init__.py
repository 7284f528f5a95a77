"""Spectrum control as a method: its flags and prior, and what it does after an update."""
