//! dev
use kv_testkit::sim::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let seed = a[1].parse().unwrap();
    match run(SimOptions::replay(seed)) {
        Ok(r) => println!("{}\n ok {}", r.trace.join("\n"), r.lives),
        Err(e) => println!("{}\n{e}", e.trace.join("\n")),
    }
}
