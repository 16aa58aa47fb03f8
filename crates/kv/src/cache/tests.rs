//! Tests of the cache.
