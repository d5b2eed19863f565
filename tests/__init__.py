"""The contract every step keeps, and the tests of everything around the steps."""
