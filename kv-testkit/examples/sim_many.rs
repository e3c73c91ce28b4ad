//! dev
use kv_testkit::sim::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let t = std::time::Instant::now();
    match run(SimOptions::new(a[1].parse().unwrap(), a[2].parse().unwrap())) {
        Ok(r) => println!("{r:#?} {:?}", t.elapsed()),
        Err(e) => println!("{e}"),
    }
}
