//! The C API of the Mooncake transfer engine, opened at run time: no headers, no bindgen, no C++ compiler, nothing linked.
//!
//! [`Api::open`] looks for `libtransfer_engine.so` and gives its functions, or an error that lists every place it looked
//! at. A machine without the library builds and runs everything else.
//!
//! # Which builds have it
//!
//! | build | C API |
//! |---|---|
//! | from source with `-DBUILD_SHARED_LIBS=ON` | yes (never run here: what was run is the wheel below) |
//! | from source otherwise (the default) | no: a static library |
//! | wheel `mooncake-transfer-engine-npu`, from 0.3.12 on, x86_64 | yes: what `cargo xtask setup mooncake` fetches |
//! | wheels `mooncake-transfer-engine`, `-cuda13`, `-non-cuda`, `-rocm`, `-efa-non-cuda` | no: Python's `engine.so` alone |
//!
//! So a host that has only `pip install mooncake-transfer-engine` has no library for this crate; the error says so. It
//! builds the library from source and names it in `KV_MOONCAKE_LIB`, or speaks Mooncake's TCP wire without it.
//!
//! The wheel for Ascend asks for three libraries of Ascend's drivers. Without a card, empty libraries of those names do,
//! beside it or in a folder `stubs`; nothing calls them when `MC_FORCE_TCP` is set. Without `MC_FORCE_TCP` making an engine
//! calls the drivers, and ends the process where there are none: see [`Api::is_for_ascend`].
//!
//! # The library's own ways (0.3.13.post1)
//! * [`Api::get_transfer_status`] leaves the status untouched when it returns an error: look at the code first.
//! * [`Api::free_batch_id`] refuses until every task was *seen* ended by `get_transfer_status`.
//! * There is no way to cancel anything.
//! * C++ exceptions cross these functions, and end the process: [`Api::open_segment_no_cache`] throws one for a peer whose
//!   descriptor has members of odd types. Look at it first.
//! * It brings a Go runtime with its threads and signal handlers: never close it, never fork without exec after it.
#![deny(unsafe_op_in_unsafe_fn)]

mod find;
mod open;

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

pub use find::{Place, Tried, places};

/// An engine (`transfer_engine_t`).
pub type Engine = *mut c_void;
/// A peer's segment (`segment_id_t`): negative is an error.
pub type Segment = i32;
/// A batch (`batch_id_t`).
pub type Batch = u64;

/// No batch (`INVALID_BATCH`).
pub const INVALID_BATCH: Batch = u64::MAX;
/// `OPCODE_READ`.
pub const READ: c_int = 0;
/// `OPCODE_WRITE`.
pub const WRITE: c_int = 1;
/// The metadata server of engines that ask each other.
pub const P2P_HANDSHAKE: &std::ffi::CStr = c"P2PHANDSHAKE";

/// One piece to move (`transfer_request_t`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// [`READ`] or [`WRITE`].
    pub opcode: c_int,
    /// First byte here.
    pub source: *mut c_void,
    /// Whose memory.
    pub target: Segment,
    /// First byte there: an address.
    pub target_offset: u64,
    /// Bytes.
    pub length: u64,
}

/// How a task stands (`transfer_status_t`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Status {
    /// One of [`task`].
    pub status: c_int,
    /// Bytes that are through.
    pub transferred: u64,
}

/// Values of [`Status::status`].
pub mod task {
    use std::ffi::c_int;

    /// Not ended.
    pub const WAITING: c_int = 0;
    /// Not ended.
    pub const PENDING: c_int = 1;
    /// Refused.
    pub const INVALID: c_int = 2;
    /// Taken back.
    pub const CANCELED: c_int = 3;
    /// Every byte is in place.
    pub const COMPLETED: c_int = 4;
    /// It takes long. It may still end in any way.
    pub const TIMEOUT: c_int = 5;
    /// It failed.
    pub const FAILED: c_int = 6;

    /// Its name and number.
    pub fn name(status: c_int) -> &'static str {
        match status {
            WAITING => "waiting (0)",
            PENDING => "pending (1)",
            INVALID => "invalid (2)",
            CANCELED => "canceled (3)",
            COMPLETED => "completed (4)",
            TIMEOUT => "timeout (5)",
            FAILED => "failed (6)",
            _ => "a status this version does not know",
        }
    }
}

/// What codes that functions return mean; some return them negative.
pub fn code_name(code: c_int) -> &'static str {
    match code.unsigned_abs() {
        0 => "success (0)",
        1 => "invalid argument (1)",
        2 => "too many requests (2)",
        3 => "address not registered (3)",
        4 => "batch busy (4)",
        6 => "device not found (6)",
        7 => "address overlapped (7)",
        8 => "not supported by the transport (8)",
        101 => "name not resolved (101)",
        102 => "socket (102)",
        103 => "malformed JSON (103)",
        104 => "handshake rejected (104)",
        200 => "metadata (200)",
        201 => "endpoint (201)",
        202 => "context (202)",
        300 => "NUMA (300)",
        301 => "clock (301)",
        302 => "memory (302)",
        303 | 999 => "not implemented",
        _ => "a code this version does not know",
    }
}

/// Why there is no library.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// None of the places has one that can be used.
    #[error("{}", describe(.0))]
    NotFound(Vec<Tried>),
    /// Not the C API, or that of an older release: a function is missing.
    #[error("{} has no function {symbol}: it is not Mooncake's C API, or older than 0.3.12", .path.display())]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
}

fn describe(tried: &[Tried]) -> String {
    let mut out = String::from("libtransfer_engine.so (Mooncake's C API) is not to be had: ");
    for t in tried {
        out.push_str(&t.to_string());
        out.push_str("; ");
    }
    if tried.iter().any(|t| open::STAND_INS.iter().any(|name| t.why.contains(name))) {
        out.push_str(
            "a build for Ascend needs Ascend's drivers, or empty stand-ins beside it (`cargo xtask setup mooncake` makes them); ",
        );
    }
    out.push_str(
        "of the wheels only mooncake-transfer-engine-npu has the C API: `cargo xtask setup mooncake` here, or build \
         Mooncake with -DBUILD_SHARED_LIBS=ON, or set KV_MOONCAKE_LIB to its path",
    );
    out
}

macro_rules! api {
    (
        $($(#[$doc:meta])* $name:ident = $symbol:literal($($arg:ident: $type:ty),*) -> $ret:ty;)*
        ---
        $($(#[$odoc:meta])* $oname:ident = $osymbol:literal($($oarg:ident: $otype:ty),*) -> $oret:ty;)*
    ) => {
        /// The library's functions.
        ///
        /// # Safety of all of them
        /// Engines and batches are live, pointers point to what their type says, strings end in 0, memory that a batch
        /// names stays where it is until every task of it has ended.
        #[allow(missing_debug_implementations)] // function pointers say nothing
        pub struct Api {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) -> $ret,)*
            $($(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oarg: $otype),*) -> $oret>,)*
            path: PathBuf,
            // Never closed: the library's threads and destructors outlive every engine.
            _library: std::mem::ManuallyDrop<libloading::os::unix::Library>,
        }

        impl Api {
            fn resolve(library: libloading::os::unix::Library, path: &Path) -> Result<Self, OpenError> {
                $(
                    // SAFETY: the type is that of transfer_engine_c.h.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($arg: $type),*) -> $ret>(concat!($symbol, "\0").as_bytes())
                    };
                    let Ok($name) = $name.map(|symbol| *symbol) else {
                        return Err(OpenError::Symbol { path: path.into(), symbol: $symbol });
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $oname = unsafe {
                        library.get::<unsafe extern "C" fn($($oarg: $otype),*) -> $oret>(concat!($osymbol, "\0").as_bytes())
                    };
                    let $oname = $oname.ok().map(|symbol| *symbol);
                )*
                Ok(Self {
                    $($name,)*
                    $($oname,)*
                    path: path.into(),
                    _library: std::mem::ManuallyDrop::new(library),
                })
            }
        }
    };
}

api! {
    /// An engine; null: it cannot be made.
    create_transfer_engine = "createTransferEngine"(metadata: *const c_char, local_server_name: *const c_char,
        host: *const c_char, rpc_port: u64, auto_discover: c_int) -> Engine;
    /// With everything it has. Takes up to a second.
    destroy_transfer_engine = "destroyTransferEngine"(engine: Engine) -> ();
    /// Its `host:port`, ended by 0.
    get_local_ip_and_port = "getLocalIpAndPort"(engine: Engine, text: *mut c_char, len: usize) -> c_int;
    /// Know a peer; answers from what is known, however old.
    open_segment = "openSegment"(engine: Engine, name: *const c_char) -> Segment;
    /// Ask the peer anew. Answers what is known when the peer does not answer.
    open_segment_no_cache = "openSegmentNoCache"(engine: Engine, name: *const c_char) -> Segment;
    /// Register. `remote` counts for some transports only: over TCP peers can always write.
    register_local_memory = "registerLocalMemory"(engine: Engine, addr: *mut c_void, len: usize, location: *const c_char,
        remote: c_int) -> c_int;
    /// End a registration. Over TCP, writes that have begun go on.
    unregister_local_memory = "unregisterLocalMemory"(engine: Engine, addr: *mut c_void) -> c_int;
    /// A batch for so many tasks.
    allocate_batch_id = "allocateBatchID"(engine: Engine, size: usize) -> Batch;
    /// End of a batch, all of whose tasks were seen ended.
    free_batch_id = "freeBatchID"(engine: Engine, batch: Batch) -> c_int;
    /// Start tasks.
    submit_transfer = "submitTransfer"(engine: Engine, batch: Batch, requests: *mut Request, count: usize) -> c_int;
    /// How a task stands. Untouched when the code is not 0.
    get_transfer_status = "getTransferStatus"(engine: Engine, batch: Batch, task: usize, status: *mut Status) -> c_int;
    // Newer, or not in every build.
    ---
    /// Text or JSON about links.
    show_links = "showLinks"(engine: Engine, text: *mut c_char, len: usize, json: c_int) -> c_int;
    /// Look for devices.
    discover_topology = "discoverTopology"(engine: Engine) -> c_int;
    /// Let what is in flight end when the engine does.
    enable_graceful_shutdown = "enableGracefulShutdown"(engine: Engine) -> ();
}

impl Api {
    /// Open the library: `configured` if it is given, else the first that works of [`places`].
    ///
    /// The library runs code when it is opened, and reads the environment (`MC_*`) then and later: set that before.
    ///
    /// # Errors
    /// Every place that was tried and what was wrong with it; nothing else has changed.
    pub fn open(configured: Option<&Path>) -> Result<Self, OpenError> {
        let mut tried = Vec::new();
        for place in places(configured) {
            if let Some(why) = place.absent() {
                tried.push(Tried { place, why });
                continue;
            }
            match open::library(&place.path) {
                Ok(library) => return Self::resolve(library, &place.path),
                Err(why) => tried.push(Tried { place, why }),
            }
        }
        Err(OpenError::NotFound(tried))
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is the build for Ascend cards, which calls their drivers unless `MC_FORCE_TCP` is set.
    pub fn is_for_ascend(&self) -> bool {
        self.path.with_file_name("ascend_transport.so").exists()
    }

    /// The release, as far as the installation tells: `0.3.13.post1` from
    /// `mooncake_transfer_engine_npu-0.3.13.post1.dist-info` beside a wheel's folder.
    pub fn version(&self) -> Option<String> {
        let site = self.path.parent()?.parent()?;
        let entries = std::fs::read_dir(site).ok()?;
        let names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
        let mut versions = names.filter_map(|n| {
            let (package, version) = n.strip_suffix(".dist-info")?.rsplit_once('-')?;
            package.starts_with("mooncake_transfer_engine").then(|| version.to_owned())
        });
        versions.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_are_those_of_the_header() {
        assert_eq!((size_of::<Request>(), size_of::<Status>()), (40, 16));
        assert_eq!((std::mem::offset_of!(Request, target), std::mem::offset_of!(Request, length)), (16, 32));
    }

    #[test]
    fn a_missing_library_is_an_error_that_lists_what_was_tried() {
        let Err(OpenError::NotFound(tried)) = Api::open(Some(Path::new("/nowhere/libtransfer_engine.so"))) else {
            panic!("found what is not there");
        };
        // Somebody who names a library wants that one.
        assert_eq!(tried.len(), 1);
        let text = OpenError::NotFound(tried).to_string();
        assert!(text.contains("/nowhere/libtransfer_engine.so") && text.contains("KV_MOONCAKE_LIB"), "{text}");
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let place = Place { named_by: "x".into(), path: "/p/libtransfer_engine.so".into() };
        let why = "libascendcl.so: cannot open shared object file: No such file or directory".into();
        let text = describe(&[Tried { place, why }]);
        assert!(text.contains("Ascend's drivers") && text.contains("cargo xtask setup mooncake"), "{text}");
    }

    #[test]
    fn a_library_that_is_something_else_is_an_error_that_says_so() {
        let libc = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6", "/lib64/libm.so.6"];
        if let Some(libm) = libc.iter().map(Path::new).find(|p| p.exists()) {
            let text = Api::open(Some(libm)).err().unwrap().to_string();
            assert!(text.contains("createTransferEngine") && text.contains("not Mooncake's C API"), "{text}");
        }
    }
}
