"""Statistical and exact tests of the output distribution, and fakes for tests of extensions."""
