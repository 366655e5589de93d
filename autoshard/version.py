"""The version, which emitted files name."""

VERSION = "0.1.0"
