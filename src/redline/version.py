"""The version, in the one place that both the package and its measurements read it from."""

VERSION = "0.1.0"
