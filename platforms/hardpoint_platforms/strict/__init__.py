"""The reference made hostile: what a chip with a whole-program compiler forbids is forbidden here, with no hardware."""
