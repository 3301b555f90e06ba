"""What several applications share on the web: access control, connection limits, request logs, streams of events."""
