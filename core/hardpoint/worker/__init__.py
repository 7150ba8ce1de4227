"""The worker: one rank's device, weights and paged state, and the step that turns a plan into a result."""
