"""The naive form that each fast one is defined by: float64, loops where loops are clearest."""
