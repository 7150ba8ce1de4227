"""The conformance kit: holds an installed platform against the SPI, level by level, and says what is wrong where.

    subject.py    the device under test            checks.py    what a check is
    runner.py     runs checks, keeps verdicts      ladder.py    which level they add up to
    audit.py memory.py contracts.py attention.py state.py programs.py sampling.py collectives.py transfer.py   groups
    mutants.py    seeded faults, each of which the kit must catch

Run it: `hardpoint conformance --device NAME`, `pytest --hardpoint-device NAME`, or, without the core installed,
`python -m hardpoint_platforms.conformance --device NAME`.
"""
