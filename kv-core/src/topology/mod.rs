//! Which prefill ranks a decode rank contacts (protocol section 3).
