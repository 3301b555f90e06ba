"""The parts that the web servers of several applications share: access control, connection limits, request logs."""
