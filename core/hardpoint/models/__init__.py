"""Decoders: families read a config into a spec, `decoder` binds a spec's ops, `registry` picks the family."""
