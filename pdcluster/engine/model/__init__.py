"""What a model is made of: config, weights, rope, shards, batches, collectives."""
