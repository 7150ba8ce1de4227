"""Op contracts: what the core may ask of a device. One file per family; `catalogue` lists them all."""
