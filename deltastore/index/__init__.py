"""The SQL index of a store. Import from `deltastore.index.index` and `deltastore.index.records`."""
