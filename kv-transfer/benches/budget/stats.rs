//! Medians, quantiles, and page lists that every process makes alike.

/// The middle one.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value below which this share lies.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = ((sorted.len().saturating_sub(1)) as f64 * q).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// Numbers `0..n` in an order that depends on the seed only.
pub fn shuffled(n: usize, seed: u64) -> Vec<usize> {
    let mut list: Vec<usize> = (0..n).collect();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for i in (1..n).rev() {
        // The high bits of a 64-bit LCG are random enough to shuffle with.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        list.swap(i, (state >> 33) as usize % (i + 1));
    }
    list
}

/// [`shuffled`], as page numbers.
pub fn shuffled_pages(n: usize, seed: u64) -> Vec<i32> {
    shuffled(n, seed).into_iter().map(|p| p as i32).collect()
}
