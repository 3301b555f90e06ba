"""Shipped plans, one for each application and kind of machine."""
