"""This plugin's own ops, where XLA needs another form than the reference's."""
