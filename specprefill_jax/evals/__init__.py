"""Measuring a running server from outside: a load client over HTTP, and what its records say. No JAX here."""
