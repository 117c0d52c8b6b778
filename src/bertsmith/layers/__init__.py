"""Parts with weights. Each acts on the last axis, so one class serves padded and packed batches."""
