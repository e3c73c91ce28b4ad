//! `kv-fuzz`: the driver for stable Rust, and the keeper of the corpus.
//!
//! ```text
//! kv-fuzz list                                   names of the targets
//! kv-fuzz seeds [TARGET]                         write seeds that are missing into fuzz/corpus
//! kv-fuzz words TARGET                           its words, as a libFuzzer dictionary
//! kv-fuzz run TARGET SECONDS SEED DIRECTORY      fuzz from the corpus; crashes go into the directory
//! kv-fuzz try TARGET FILE..                      run these inputs
//! kv-fuzz hunt SECONDS SEED                      (feature `mutants`) inputs for known faults that the corpus misses
//! ```

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use kv_fuzz::{TARGETS, Target, corpus, driver};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match command(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("kv-fuzz: {e}");
            ExitCode::from(2)
        }
    }
}

fn command(args: &[&str]) -> Result<bool, String> {
    match args {
        ["list"] => {
            TARGETS.iter().for_each(|t| println!("{}", t.name));
            Ok(true)
        }
        ["seeds", names @ ..] => {
            for target in TARGETS.iter().filter(|t| names.is_empty() || names.contains(&t.name)) {
                let n = corpus::write_seeds(target, &corpus::dir(target)).map_err(|e| e.to_string())?;
                println!("{}: {n} seeds written", target.name);
            }
            Ok(true)
        }
        ["words", name] => {
            for word in find(name)?.words {
                let escaped: String = word.iter().map(|b| format!("\\x{b:02x}")).collect();
                println!("\"{escaped}\"");
            }
            Ok(true)
        }
        ["run", name, seconds, seed, dir] => {
            let number = |text: &str| text.parse::<u64>().map_err(|_| format!("'{text}' is not a number"));
            run(find(name)?, Duration::from_secs(number(seconds)?), number(seed)?, Path::new(dir))
        }
        #[cfg(feature = "mutants")]
        ["hunt", seconds, seed] => {
            let number = |text: &str| text.parse::<u64>().map_err(|_| format!("'{text}' is not a number"));
            hunt(Duration::from_secs(number(seconds)?), number(seed)?).map_err(|e| e.to_string())
        }
        ["try", name, files @ ..] => {
            let target = find(name)?;
            for file in files {
                let input = fs::read(file).map_err(|e| format!("{file}: {e}"))?;
                (target.run)(&input);
                println!("{file}: passes");
            }
            Ok(true)
        }
        _ => Err("usage: kv-fuzz list | seeds [TARGET] | words TARGET | run TARGET SECONDS SEED DIRECTORY | try TARGET FILE..".into()),
    }
}

fn find(name: &str) -> Result<&'static Target, String> {
    kv_fuzz::target(name).ok_or_else(|| format!("no target '{name}'; `kv-fuzz list` names them"))
}

fn run(target: &Target, time: Duration, seed: u64, dir: &Path) -> Result<bool, String> {
    let from = corpus::dir(target);
    let inputs = corpus::read(&from).map_err(|e| format!("{}: {e}", from.display()))?;
    let inputs: Vec<_> = inputs.into_iter().map(|(_, bytes)| bytes).collect();
    let report = driver::run(target, &inputs, time, seed);
    for crash in &report.crashes {
        fs::create_dir_all(dir).map_err(|e| e.to_string())?;
        let path = dir.join(corpus::file_name("crash", crash));
        fs::write(&path, crash).map_err(|e| e.to_string())?;
        eprintln!("crash: {}", path.display());
    }
    // For `cargo xtask fuzz`.
    println!(
        "executions={} seconds={:.1} slowest_ms={} crashes={}",
        report.executions,
        report.elapsed.as_secs_f64(),
        report.slowest.as_millis(),
        report.crashes.len()
    );
    Ok(report.crashes.is_empty())
}

#[cfg(feature = "mutants")]
fn hunt(time: Duration, seed: u64) -> std::io::Result<bool> {
    use kv_fuzz::faults;
    std::panic::set_hook(Box::new(|_| {}));
    let mut all = true;
    for mutant in faults::ALL {
        if faults::found_by(*mutant)?.is_some() {
            continue;
        }
        match faults::hunt(*mutant, time, seed)? {
            Some((target, input)) => {
                let path = corpus::dir(target).join(corpus::file_name("fault", &input));
                fs::write(&path, &input)?;
                println!("{mutant:?}: {} bytes in {}", input.len(), target.name);
            }
            None => {
                all = false;
                println!("{mutant:?}: not found");
            }
        }
    }
    Ok(all)
}
