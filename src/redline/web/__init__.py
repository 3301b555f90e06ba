"""Provides what all web servers of Redline share: access control, connection limits, request logs, event streams."""
