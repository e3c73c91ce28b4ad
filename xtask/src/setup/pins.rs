//! The wheels that backends' libraries are taken from, pinned by hash. To add a backend is to add a row.

use crate::sh::Result;

/// One backend's library, in a wheel of a Python package.
#[derive(Debug)]
pub struct Pin {
    /// The backend's name, as `KV_REQUIRE_BACKENDS` has it.
    pub backend: &'static str,
    /// The package, as its wheels spell it.
    pub package: &'static str,
    pub version: &'static str,
    /// Implementation and version of Python the wheels are for. We take C libraries out of them: the Python that is
    /// here may be another one.
    pub python: &'static str,
    pub wheels: &'static [Wheel],
    /// Folders and files of the wheel that the library needs, and the folder with licences and version.
    pub keep: &'static [&'static str],
    /// The library itself, a path in the wheel.
    pub library: &'static str,
    /// What the library needs of the system, as Debian calls it.
    pub packages: &'static [&'static str],
    /// Libraries of a vendor's drivers that the loader asks for and nothing here calls: each becomes a link to the first,
    /// which lies beside the library.
    pub stand_ins: Option<(&'static str, &'static [&'static str])>,
    /// Variable by which users name a library of their own instead.
    pub variable: &'static str,
}

/// One processor's wheel.
#[derive(Debug)]
pub struct Wheel {
    /// As `std::env::consts::ARCH` has it.
    pub arch: &'static str,
    pub file: &'static str,
    pub sha256: &'static str,
}

pub const PINS: &[Pin] = &[NIXL, MOONCAKE];

const NIXL: Pin = Pin {
    backend: "nixl",
    package: "nixl_cu12",
    version: "1.5.1",
    python: "cp311",
    wheels: &[
        Wheel {
            arch: "x86_64",
            file: "nixl_cu12-1.5.1-cp311-cp311-manylinux_2_28_x86_64.whl",
            sha256: "341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
        },
        Wheel {
            arch: "aarch64",
            file: "nixl_cu12-1.5.1-cp311-cp311-manylinux_2_28_aarch64.whl",
            sha256: "aced5529cc9781f8be1ee22e451c852630455460c1812b06cc863b05d797f2db",
        },
    ],
    keep: &[".nixl_cu12.mesonpy.libs", "nixl_cu12.libs", "nixl_cu12-1.5.1.dist-info"],
    library: ".nixl_cu12.mesonpy.libs/libnixl_capi.so",
    packages: &[],
    stand_ins: None,
    variable: "KV_NIXL_LIB",
};

/// The build for Ascend: of all wheels the only one with the C API, and with MC_FORCE_TCP it runs anywhere. Needs glibc
/// 2.35. Its Python modules, programs and store are not kept.
const MOONCAKE: Pin = Pin {
    backend: "mooncake",
    package: "mooncake_transfer_engine_npu",
    version: "0.3.13.post1",
    python: "cp311",
    wheels: &[Wheel {
        arch: "x86_64",
        file: "mooncake_transfer_engine_npu-0.3.13.post1-cp311-cp311-manylinux_2_35_x86_64.whl",
        sha256: "dd846b8f71caff9b2488c7c6969ece25686f97c6c62ad38a574ca56ae0a93970",
    }],
    keep: &[
        "mooncake/libtransfer_engine.so",
        "mooncake/ascend_transport.so",
        "mooncake/libasio.so",
        "mooncake/libetcd_wrapper.so",
        "mooncake/libgflags-f3c7dc50.so.2.2.2",
        "mooncake/libglog-c040a6f3.so.0.4.0",
        "mooncake/libjsoncpp-7d699962.so.1.9.5",
        "mooncake/libunwind-5d1f6f10.so.8.0.1",
        "mooncake_transfer_engine_npu-0.3.13.post1.dist-info",
    ],
    library: "mooncake/libtransfer_engine.so",
    packages: &["libibverbs1", "libnuma1", "libcurl4"],
    stand_ins: Some(("libasio.so", &["libascendcl.so", "libllm_datadist.so", "libmetadef.so"])),
    variable: "KV_MOONCAKE_LIB",
};

impl Pin {
    /// The wheel for a machine.
    pub fn wheel(&self, os: &str, arch: &str) -> Result<&'static Wheel> {
        let found = self.wheels.iter().find(|w| os == "linux" && w.arch == arch);
        found.ok_or_else(|| {
            let archs: Vec<_> = self.wheels.iter().map(|w| w.arch).collect();
            format!(
                "there is no wheel of {} {} for {os} on {arch}, only for linux on {}; build the library, and name it \
                 in {}",
                self.package,
                self.version,
                archs.join(" and "),
                self.variable
            )
        })
    }

    /// The line of a requirements file that lets pip take this wheel and no other.
    pub fn requirement(&self, wheel: &Wheel) -> String {
        format!("{}=={} --hash=sha256:{}\n", self.package, self.version, wheel.sha256)
    }
}

impl Wheel {
    /// The platforms that the file's name ends with; a wheel may serve several.
    pub fn platforms(&self) -> impl Iterator<Item = &'static str> {
        let name = self.file.strip_suffix(".whl").unwrap_or(self.file);
        name.rsplit('-').next().unwrap_or_default().split('.')
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        for pin in PINS {
            assert_eq!(PINS.iter().filter(|p| p.backend == pin.backend).count(), 1, "{}", pin.backend);
            assert!(pin.python.starts_with("cp") && pin.python[2..].chars().all(|c| c.is_ascii_digit()));
            assert!(!pin.wheels.is_empty());
            for wheel in pin.wheels {
                let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
                assert!(wheel.sha256.len() == 64 && wheel.sha256.chars().all(hex), "{}", wheel.file);
                let start = format!("{}-{}-{}-", pin.package, pin.version, pin.python);
                assert!(wheel.file.starts_with(&start) && wheel.file.ends_with(".whl"), "{}", wheel.file);
                assert!(wheel.platforms().all(|p| p.contains("linux") && p.ends_with(wheel.arch)), "{}", wheel.file);
                assert_eq!(pin.wheels.iter().filter(|w| w.arch == wheel.arch || w.sha256 == wheel.sha256).count(), 1);
            }
            // Paths in the wheel; the library is in one, licences and version in another.
            assert!(pin.keep.iter().all(|k| k.split('/').all(|part| !part.is_empty() && part != "..")));
            assert!(pin.keep.iter().any(|k| Path::new(pin.library).starts_with(k)), "{}", pin.library);
            // A link beside the library, to what is kept there.
            let beside = |name: &str| Path::new(pin.library).with_file_name(name);
            let kept = |(like, _): (&str, _)| pin.keep.iter().any(|k| beside(like).starts_with(k));
            assert!(pin.stand_ins.is_none_or(kept), "{}", pin.backend);
            assert!(pin.keep.contains(&format!("{}-{}.dist-info", pin.package, pin.version).as_str()));
        }
    }

    #[test]
    fn the_wheel_is_that_of_the_machine() {
        let nixl = &PINS[0];
        let (x86, arm) = (nixl.wheel("linux", "x86_64").unwrap(), nixl.wheel("linux", "aarch64").unwrap());
        assert_eq!(x86.platforms().collect::<Vec<_>>(), ["manylinux_2_28_x86_64"]);
        assert_eq!(arm.platforms().collect::<Vec<_>>(), ["manylinux_2_28_aarch64"]);
        let e = nixl.wheel("linux", "riscv64").unwrap_err();
        assert!(e.contains("for linux on riscv64") && e.contains("x86_64 and aarch64"), "{e}");
        assert!(nixl.wheel("macos", "aarch64").unwrap_err().contains("KV_NIXL_LIB"));
    }

    #[test]
    fn a_wheel_may_serve_several_platforms() {
        let file = "p-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl";
        let platforms = Wheel { arch: "x86_64", file, sha256: "" }.platforms().collect::<Vec<_>>();
        assert_eq!(platforms, ["manylinux_2_17_x86_64", "manylinux2014_x86_64"]);
    }

    #[test]
    fn the_requirement_names_version_and_hash() {
        let nixl = &PINS[0];
        assert_eq!(
            nixl.requirement(&nixl.wheels[0]),
            "nixl_cu12==1.5.1 --hash=sha256:341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a\n"
        );
    }
}
