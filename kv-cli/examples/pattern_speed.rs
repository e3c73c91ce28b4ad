//! How fast pages are filled and verified on one core: `cargo run --release -p kv-transfer-cli --example pattern_speed`.

use std::time::Instant;

use kv_cli::memory::KvMemory;
use kv_cli::model::ModelSpec;
use kv_cli::pattern::{PageSource, Pattern};
use kv_cli::shape::{Rank, Shape};

fn main() -> Result<(), kv_cli::error::CliError> {
    for model in ["Qwen3-0.6B", "DeepSeek-V3"] {
        let Some(spec) = ModelSpec::preset(model) else { continue };
        let geometry = spec.rank_geometry(Shape::default(), Rank::default())?;
        let pages = u32::try_from((512 << 20) / geometry.page_bytes()).unwrap_or(1);
        let memory = KvMemory::new(geometry, pages)?;
        for pattern in [Pattern::Keyed { seed: 1 }, Pattern::Sglang] {
            let source = |page: u32| PageSource { id: u64::from(page / 8), first_token: page % 8 * 64 };
            for round in ["cold", "warm"] {
                let started = Instant::now();
                // SAFETY: this thread has the only access to the pool.
                let bytes: u64 = (0..pages).map(|p| unsafe { memory.fill(pattern, p, source(p)) }).sum();
                let fill = bytes as f64 / 1e9 / started.elapsed().as_secs_f64();
                let started = Instant::now();
                // SAFETY: as above.
                let wrong = (0..pages).filter(|&p| unsafe { memory.verify(pattern, p, source(p)) }.is_err()).count();
                let verify = bytes as f64 / 1e9 / started.elapsed().as_secs_f64();
                println!("{model} {pattern:?} {round}: fill {fill:.2} GB/s, verify {verify:.2} GB/s, {wrong} wrong");
            }
        }
    }
    Ok(())
}
