//! dense
