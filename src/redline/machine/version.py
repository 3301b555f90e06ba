"""The version of the package, also recorded in measurements."""

VERSION = "0.1.0"
