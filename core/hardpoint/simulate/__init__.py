"""simulate: the scheduler and the pager on a device that computes nothing, on a virtual clock"""
