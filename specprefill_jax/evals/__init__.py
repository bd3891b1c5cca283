"""Benchmarks: of answers, asked of a pair of models (`runner`), and of a running server, from outside (`load`)."""
