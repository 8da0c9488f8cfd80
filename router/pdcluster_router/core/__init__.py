"""A request as data, ids, tenants, stages."""
