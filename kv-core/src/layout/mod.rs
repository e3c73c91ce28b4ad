//! Geometry of both sides: KV, aux and state entries, and how they pair.
