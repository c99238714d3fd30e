"""The training engine, the cache of trained networks, schedules, augmentation, pretrained weights."""
