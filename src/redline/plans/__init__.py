"""Shipped plans, one for each workload and kind of machine."""
