"""sim: a device that computes nothing, on virtual time"""
